"""In which layouts a request is read and answered, decided once from what each is forecast to take. Pure."""
