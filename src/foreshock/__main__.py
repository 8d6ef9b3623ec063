from foreshock.cli.main import app

app()
